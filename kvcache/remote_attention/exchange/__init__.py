"""What passes between a debtor and a creditor: messages, buffers, endpoints, shape and limits.

May import nothing of the rooms beside it.
"""

from kvcache.remote_attention.exchange.buffers import Buffers
from kvcache.remote_attention.exchange.endpoint import (
    PURPOSE,
    connect,
    listen_tcp,
    listen_unix,
    said_fields,
)
from kvcache.remote_attention.exchange.messages import (
    HEAD,
    REFUSAL_BYTES,
    BorrowedPages,
    Head,
    Kind,
    Refusal,
    RemoteSpan,
    StepPlan,
    pack_ranges,
    unpack_ranges,
)
from kvcache.remote_attention.exchange.shape import AttentionShape, Limits

__all__ = [
    "HEAD",
    "PURPOSE",
    "REFUSAL_BYTES",
    "AttentionShape",
    "BorrowedPages",
    "Buffers",
    "Head",
    "Kind",
    "Limits",
    "Refusal",
    "RemoteSpan",
    "StepPlan",
    "connect",
    "listen_tcp",
    "listen_unix",
    "pack_ranges",
    "said_fields",
    "unpack_ranges",
]
