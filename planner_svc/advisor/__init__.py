"""`neoflex plan`: which execution policy fits a model to a machine, from figures alone."""
