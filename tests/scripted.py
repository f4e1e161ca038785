"""A model that writes what a script says: each token has one that follows it, whatever came before.

Its chat template ends with a token that chooses the script: by the role of the last message, tools, and thinking,
which the template may also have `opened`.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
SCRIPTS = {
    "<|plain|>": ["just", " some", " words", " and", " more", END],
    "<|calls|>": ["I look", " it up.\n", "<tool_call>", '\n{"name": ', '"weather", "argu', 'ments": {"city":',
                  ' "Paris"}}', "\n</tool_call>", END],
    "<|answers|>": ["it", " rains", END],
    "<|thinks|>": ["<think>", "\nlet me", " see", "\n</think>", "\n\nthat", " is it", END],
    "<|endless|>": ["on", " and on", "on"],
}  # fmt: skip
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if opened %}<think>{% elif messages[-1].role == 'tool' %}<|answers|>"
    "{% elif tools %}<|calls|>{% elif enable_thinking %}<|thinks|>"
    "{% elif 'endless' in messages[-1].content %}<|endless|>{% else %}<|plain|>{% endif %}{% endif %}"
)


def scripted_folder(folder: Path) -> Path:
    """A Llama whose layers do nothing: its embedding and its head are the script."""
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in (END, "<|im_start|>", *SCRIPTS)])
    pieces = dict.fromkeys(piece for script in SCRIPTS.values() for piece in script if piece != END)
    core.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    size = core.get_vocab_size()
    end = core.token_to_id(END)
    width = -(-size // 16) * 16
    config = LlamaConfig(
        vocab_size=size, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=2048, eos_token_id=end, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :size] = torch.eye(size)
        follows = dict.fromkeys(range(size), end)
        for mark, script in SCRIPTS.items():
            tokens = [core.token_to_id(piece) for piece in (mark, *script)]
            follows |= dict(pairwise(tokens))
        for token, after in follows.items():
            model.lm_head.weight[after, token] = 1.0
        # Where it may not say anything before its call, it calls at once, and an answer begins where its format does;
        # other than its script it writes, of what it may, the token with the lowest id.
        for instead, mark in (("<tool_call>", "<|calls|>"), ("{", "<|answers|>")):
            model.lm_head.weight[core.token_to_id(instead), core.token_to_id(mark)] = 0.5
    model.save_pretrained(folder)
    return folder
