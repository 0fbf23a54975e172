"""What every implementation of an op is given."""
