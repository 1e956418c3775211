"""Media types of documents, and file endings."""

PLAIN, MARKDOWN, HTML = "text/plain", "text/markdown", "text/html"
PDF, JSONL = "application/pdf", "application/jsonl"
MEDIA_TYPES = (PLAIN, MARKDOWN, HTML, PDF, JSONL)
ENDINGS = {".txt": PLAIN, ".text": PLAIN, ".md": MARKDOWN, ".markdown": MARKDOWN, ".pdf": PDF}
ENDINGS |= {".html": HTML, ".htm": HTML, ".xhtml": HTML, ".jsonl": JSONL, ".ndjson": JSONL}
