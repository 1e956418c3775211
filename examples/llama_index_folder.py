"""Answers a question with LlamaIndex's retriever over a folder and FusionKV as the LLM, in two orders of passages."""

import argparse

from llama_index.core import SimpleDirectoryReader, SimpleKeywordTableIndex
from llama_index.core.schema import MetadataMode

from fusionkv.llama_index import FusionKV

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder")
parser.add_argument("question")
parser.add_argument("--gateway", default="127.0.0.1:7072")
args = parser.parse_args()

# Its passages are encoded alone, so that one copy of each serves every order.
llm = FusionKV(address=args.gateway, max_tokens=32, recipe="deeplayer")
index = SimpleKeywordTableIndex.from_documents(SimpleDirectoryReader(args.folder).load_data(), llm=llm)
nodes = index.as_retriever(retriever_mode="simple", num_chunks_per_query=8).retrieve(args.question)
passages = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]

for order in (passages, passages[::-1]):
    answer = llm.complete(args.question, passages=order)
    summary = answer.additional_kwargs["summary"]
    print(answer.text.strip())
    print(
        f"  {len(order)} passages, {summary['chunks_missed']} not in the cache; "
        f"{summary['tokens_encoded'] + summary['tokens_recomputed']} of {summary['context_tokens']} tokens computed, "
        f"first token after {summary['seconds']['ttft']:.2f} s"
    )
