"""What each form of an attention costs on a device, as formulas and as numbers."""
