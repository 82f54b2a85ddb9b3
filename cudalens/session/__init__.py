"""Opens, closes and concludes a checked block; the public functions.  The only wiring."""
