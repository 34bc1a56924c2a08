"""Text: token ids become text as they stream, and output follows a grammar.

May import `engine.scheduling` and the rooms below it.
"""

from engine.text.detokenizer import Detokenizer, Released, token_bytes
from engine.text.grammar import Grammars

__all__ = ["Detokenizer", "Grammars", "Released", "token_bytes"]
