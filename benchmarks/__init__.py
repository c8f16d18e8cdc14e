"""Measurements with a noise floor: `knittrans bench NAME`."""
