"""Which positions of an axis a result is made of, operator by operator."""
