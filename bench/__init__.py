"""Measurements, side by side in one run; never asserted in a test."""
