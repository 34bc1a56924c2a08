"""Receive leases: slots, addresses, receiving and sending. Imports no torch."""

from kvcache.lease.address import KVAddress
from kvcache.lease.control_slots import CLAIM, LANDED, NONCE, RENEWALS, SLOTS, WORDS, ControlSlots
from kvcache.lease.identity import Identity
from kvcache.lease.landings import Landing, Landings
from kvcache.lease.page_sends import PageSends
from kvcache.lease.put import PageTable, Put
from kvcache.lease.receiver import LeasablePages, LeaseReceiver, LeaseSequences
from kvcache.lease.sender import Mirror, Sender
from kvcache.lease.table import ReceiveLease
from kvcache.lease.write_slots import WriteSlots

__all__ = [
    "CLAIM",
    "LANDED",
    "NONCE",
    "RENEWALS",
    "SLOTS",
    "WORDS",
    "ControlSlots",
    "Identity",
    "KVAddress",
    "Landing",
    "Landings",
    "LeasablePages",
    "LeaseReceiver",
    "LeaseSequences",
    "Mirror",
    "PageSends",
    "PageTable",
    "Put",
    "ReceiveLease",
    "Sender",
    "WriteSlots",
]
