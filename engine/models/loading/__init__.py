"""Loading: from a folder, a GGUF file or an alias to a configuration, weights and a tokenizer.

Imports the shapes and errors of `engine.models`, and nothing here: `locate` starts without torch.
"""
