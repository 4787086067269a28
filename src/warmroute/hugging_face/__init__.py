"""Tokenizer files of models on the Hugging Face hub: from the local cache, or downloaded."""
