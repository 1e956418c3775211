"""Media types of documents, and file endings."""

PLAIN, MARKDOWN, HTML = "text/plain", "text/markdown", "text/html"
PDF, JSONL = "application/pdf", "application/jsonl"
MEDIA_TYPES = (PLAIN, MARKDOWN, HTML, PDF, JSONL)
ENDINGS = {
    **dict.fromkeys((".txt", ".text"), PLAIN),
    **dict.fromkeys((".md", ".markdown"), MARKDOWN),
    **dict.fromkeys((".html", ".htm", ".xhtml"), HTML),
    ".pdf": PDF,
    **dict.fromkeys((".jsonl", ".ndjson"), JSONL),
}
