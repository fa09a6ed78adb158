"""Facts: plain data about a call and about a machine.  Imports nothing but the standard library.

``None`` means *unknown* and nothing else; ``ABSENT`` means *looked for and not there*.
"""

from .call import Call
from .flat import CALL_FACTS, facts_of, features_of
from .machine import Device, Machine
from .packages import PACKAGE_STATES, Package
from .values import ABSENT, DTYPES, FLOATS, HALF, Absent, dtype_name

__all__ = [
    "ABSENT",
    "CALL_FACTS",
    "DTYPES",
    "FLOATS",
    "HALF",
    "PACKAGE_STATES",
    "Absent",
    "Call",
    "Device",
    "Machine",
    "Package",
    "dtype_name",
    "facts_of",
    "features_of",
]
