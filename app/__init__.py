"""Fencepost: durable operations for long external effects, each done once or openly in doubt."""
