"""What decides whether an answer is right."""
