"""Stand-ins for vendors' attention packages: recorded signatures, the reference's mathematics, vendors' conventions.

`STAND_INS` of every module here, in one tuple. A test of an adapter runs inside `with stand_in.installed() as calls:`.
"""

import importlib
import pkgutil

from safelight_stand_ins.recorded import Call, NotRecorded, Recorder, signature_of
from safelight_stand_ins.stand_in import StandIn

STAND_INS: tuple[StandIn, ...] = tuple(
    stand_in
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
    for stand_in in getattr(importlib.import_module(f"{__name__}.{module.name}"), "STAND_INS", ())
)

__all__ = ["STAND_INS", "Call", "NotRecorded", "Recorder", "StandIn", "signature_of"]
