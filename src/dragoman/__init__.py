"""Dragoman reads a language model's hidden states in plain words and proves the reading."""
