"""Makes golden stores: ``python -m tools.make_golden_stores FOLDER``.

Those in ``tests/fixtures/golden`` were made once, and are never made anew: that every later version
reads them is what they are for. A version that adds something to the format adds a maker to
``tests/support/golden.py``, and the store that it makes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["CASNAP_GC"] = "off"


def main() -> None:
    from tests.support.golden import MAKERS, make

    parser = argparse.ArgumentParser(description="Make golden stores.")
    parser.add_argument("folder", type=Path, help="where to; what is there stays")
    args = parser.parse_args()
    with TemporaryDirectory() as work:
        os.environ["CASNAP_CACHE_DIR"] = f"{work}/cache"
        for name in MAKERS:
            if not (args.folder / f"{name}.tar.xz").exists():
                make(name, args.folder, Path(work))


if __name__ == "__main__":
    main()
