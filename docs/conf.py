"""The documentation as a site: ``make docs``. The pages are Markdown and stand on their own as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from moesaic import __version__

project = "Moesaic"
author = "the Moesaic authors"
copyright = author  # Sphinx's name
release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["benchmarks/raw"]
myst_heading_anchors = 4  # links to headings, with the anchors that code hosts make
myst_enable_extensions = ["colon_fence"]
nitpicky = True  # a link that leads nowhere is a warning, and `make docs` takes warnings for errors

html_theme = "furo"
html_title = f"Moesaic {release}"
html_copy_source = False
html_show_sphinx = False
linkcheck_anchors = False
linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)"]
