"""The way in and out: what a user hands over becomes a ``Program``, and a ``Program`` becomes one of its kind again."""
