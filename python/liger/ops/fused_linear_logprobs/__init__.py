"""Log-probabilities of target tokens under a linear layer."""
