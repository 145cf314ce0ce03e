"""The pure room: words, rules and decisions. No I/O, no clock, no SQL."""
