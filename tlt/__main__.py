"""`python -m tlt` is `tlt`."""

import sys

from tlt.apps.cli.main import main

sys.exit(main())
