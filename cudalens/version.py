"""The version of this release, in one place."""

VERSION = "0.1.0"
