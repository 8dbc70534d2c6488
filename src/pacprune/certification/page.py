"""verify.html: level 1 of a verification in any browser, alone or with a certificate in it."""

import base64
import json
from pathlib import Path

from pacprune.certification import verify

PAGE = Path(__file__).parents[1] / "assets" / "verify.html"
NAMES = (verify.RECORD, verify.PACKED, *(f"{name}.safetensors" for names in verify.FILES.values() for name in names))
"""The files that a certificate folder can have; no others are put into a page."""


def page() -> str:
    """The page into which a reader drops a certificate folder; it needs neither a network nor Python."""
    return PAGE.read_text(encoding="utf-8")


def embedded(folder: str | Path) -> str:
    """The page with the files of a certificate folder in it, which it verifies as soon as it is opened.

    Such a page is the word of whoever sends it, and says so: its script may have been changed along with its content.

    Args:
        folder: The folder that holds certificate.json.

    Returns:
        The page; a certificate that is false, or cannot be read, is shown as such.

    Raises:
        ValueError: If a file is missing, is no regular file, or is too large.
    """
    files = {}
    for name in NAMES:
        path = Path(folder) / name
        if name == verify.RECORD or path.is_symlink() or path.exists():
            try:
                content = verify._read_bytes(path, verify.MOST_RECORD if name == verify.RECORD else verify.MOST_FILE)
            except OSError as error:
                raise ValueError(f"{folder} is no whole certificate folder ({error}); ask the issuer for it") from error
            files[name] = base64.b64encode(content).decode()
    # Base64 has no character that HTML or JSON would read as anything else.
    block = f'<script type="application/json" id="embedded">{json.dumps(files)}</script>\n'
    head, script = page().split("<script>", 1)
    return f"{head}{block}<script>{script}"
