"""`python -m tlt` is `tlt`."""

import sys

from tlt.cli.main import main

sys.exit(main())
