"""A scorer for tests: a tiny CLIP as transformers saves it, and the same score by transformers alone.

The second is what a run file names as `clip_scorer.py:Plain`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from loopwright.rewards import Sample

LENGTH = 12


def build(folder: Path) -> Path:
    """Random weights, a tokenizer of bytes and an image processor."""
    alphabet = ["<pad>", "<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    torch.manual_seed(0)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": len(alphabet), "max_position_embeddings": LENGTH, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**layers, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config={**layers, **text}, vision_config=vision, projection_dim=16)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    _tokenizer(alphabet).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return folder


def _tokenizer(alphabet: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    marks = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **marks)


class Plain:
    """The mean cosine of prompt and frames: one clip after another, nothing of the engine."""

    def __init__(self, model: str):
        self.model = CLIPModel.from_pretrained(model).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.processor = CLIPImageProcessor.from_pretrained(model)

    @torch.no_grad()
    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.score(sample) for sample in samples]

    def score(self, sample: Sample) -> float:
        padded = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        tokens = self.tokenizer([sample.prompt], **padded)
        pixels = self.processor(images=list(sample.frames.numpy()), return_tensors="pt")
        text = self.model.get_text_features(**tokens).pooler_output
        seen = self.model.get_image_features(**pixels).pooler_output
        text, seen = (v / v.square().sum(dim=-1, keepdim=True).sqrt() for v in (text, seen))
        return (seen * text).sum(dim=-1).mean().item()
