"""From logits to the next tokens: what requests ask for as arrays, and the compiled sampling program."""
