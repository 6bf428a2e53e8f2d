"""A decoder's linear part: checkpoint in, hidden states and logits out; attention itself is elsewhere."""
