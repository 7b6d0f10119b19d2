"""The learning rate for another batch, when a longer context puts more tokens into each step."""
