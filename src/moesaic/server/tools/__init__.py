"""Tool calls in the text of models: parsers, and grammars that make a model call."""
