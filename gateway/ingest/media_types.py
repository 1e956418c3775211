"""Media types of documents, and file endings."""

PLAIN, MARKDOWN, HTML, PDF, JSONL = (
    "text/plain",
    "text/markdown",
    "text/html",
    "application/pdf",
    "application/jsonl",
)
MEDIA_TYPES = (PLAIN, MARKDOWN, HTML, PDF, JSONL)
ENDINGS = {
    ".txt": PLAIN,
    ".text": PLAIN,
    ".md": MARKDOWN,
    ".markdown": MARKDOWN,
    ".html": HTML,
    ".htm": HTML,
    ".xhtml": HTML,
    ".pdf": PDF,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
}
