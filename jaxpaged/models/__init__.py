"""The Llama decoder, checkpoint readers, the tokenizer. It imports none of them: each has heavy needs of its own."""
