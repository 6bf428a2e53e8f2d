"""The decoder: weights in, hidden states and logits out; attention itself is elsewhere."""
