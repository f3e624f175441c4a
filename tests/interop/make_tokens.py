"""Writes tests/golden/smollm2_tokens.json: texts and their ids in SmolLM2's tokenizer.

Two independent programs must agree on every text before the file is written:
- `tokenizers`, built from the GGUF file with the digits-one-by-one pre-tokenizer (smollm2.py says why);
- llama.cpp: `node llama_cpp_tokens.mjs MODEL.gguf texts.json ids.json` (see README.md).

    python make_tokens.py --texts texts.json            # writes the texts for llama.cpp
    python make_tokens.py --llama-cpp-ids ids.json      # compares, then writes the golden file
"""

import argparse
import json
from pathlib import Path

import smollm2

OUT = Path(__file__).parents[1] / "golden/smollm2_tokens.json"

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "a",
    "Hello world",
    "Hello, world!",
    " Hello world ",
    "   leading and trailing   ",
    "The quick brown fox jumps over the lazy dog.",
    "안녕하세요, 세계! 오늘 날씨가 참 좋네요.",
    "한국어 문장에는 띄어쓰기가 있습니다. 2026년 11월 29일",
    "\uac01",
    "\u1100\u1161\u11a8",
    "你好，世界！今天天气很好。",
    "二〇二六年，人工智能的发展非常迅速。",
    "繁體中文與简体中文",
    "こんにちは、世界。カタカナとひらがな、漢字。",
    "ｶﾀｶﾅ ＡＢＣ １２３",
    "مرحبا بالعالم، كيف حالك؟",
    "السعر ١٢٣٫٤٥ ريال",
    "שלום עולם",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "मूल्य १२३ रुपये",
    "สวัสดีชาวโลก",
    "বাংলা ভাষা",
    "தமிழ் மொழி",
    "Привет, мир! Как дела?",
    "Ёлка и йод",
    "Grüße aus München: Straße, Äpfel, Öl, Übermut.",
    "¿Qué tal, señor? ¡Olé!",
    "Çàéèêë naïve façade cœur",
    "Zażółć gęślą jaźń",
    "Tiếng Việt có dấu",
    "İstanbul ışık",
    "Ελληνικά: καλημέρα κόσμε",
    "Հայերեն ქართული",
    "😀",
    "👩‍👩‍👧‍👦 family",
    "👍🏽 thumbs 👍🏿",
    "🏳️‍🌈🇰🇷🇩🇪",
    "❤️ vs ❤",
    "emoji in text 🚀🚀🚀!",
    "1️⃣ 2️⃣",
    "2026",
    "3.14159",
    "1,000,000",
    "-273.15 °C",
    "In 2026, 1,000,000 people",
    "x2y3z4",
    "0x1F 1e-10 5%",
    " 7",
    "  7",
    "a  2",
    "a   22  b",
    "7 8  9   10",
    "\n2026\n",
    "½ ² Ⅷ ① ៣",
    "12:34:56",
    "+1 (555) 010-9999",
    "v1.2.3-rc4",
    "$19.99 €20 ₩30000",
    "10th of 1st",
    "abc123def 456ghi",
    "2026 ",
    "2026  ",
    "٠١٢ ०१२ ０１２",
    "ⅣB ₂ H₂O CO₂ m²",
    "def f(x):\n    if x > 0:\n        return x * 2\n    return -x\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}\n',
    'fn main() {\n    println!("{}", 1_000_000u64);\n}\n',
    "\tindented\n\t\ttwice\n\t\t\tthree",
    "    \t mixed \t tabs",
    '{"key": [1, 2.5, null, true], "s": "a\\nb"}',
    "SELECT * FROM t WHERE a='b' AND c<>3;",
    '<html><body class="x">&nbsp;</body></html>',
    "a+b=c; a-b==c; a**b; a//b; !a && b || c ? d : e",
    "https://example.com/path?q=1&r=%20#frag",
    "user_name@example.co.kr",
    "snake_case camelCase PascalCase SCREAMING_SNAKE kebab-case",
    "# Title\n\n- item 1\n- item 2\n\n```python\nprint(1)\n```\n",
    "\\frac{a}{b} + \\sum_{i=0}^{n} x_i^2",
    "////////// ---------- ========== **********",
    "I'm you're he's we've they'll she'd don't can't",
    "I'M YOU'RE HE'S WE'VE THEY'LL SHE'D DON'T",
    "I’m you’re it’s",
    "'s 't 're",
    "'twas 'em rock'n'roll",
    "it's2 o'clock",
    "\"quoted\" 'single' “curly” ‘curly’ «guillemets» „german“",
    "a b",
    "a  b",
    "a   b",
    "a    b",
    "a     b",
    "a          b",
    "a\nb",
    "a\n\nb",
    "a\n\n\nb",
    "a \n b",
    "a\n  b",
    "a  \n\n  b",
    "line\r\nline\r\n",
    "\n \n \n",
    " \t \n",
    "end  ",
    "end\n\n",
    "no\u00a0break\u00a0space",
    "thin\u2009space\u3000ideographic",
    "zero\u200bwidth\u200djoiner",
    "\ufeffbom",
    "nul\u0000byte",
    "bell\u0007 esc\u001b[0m",
    "soft\u00adhyphen",
    "em—dash en–dash … ellipsis",
    "vertical\u000btab\u000cfeed\u0085nel\u2028ls",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "2<|im_end|>3",
    "<|im_end|><|im_end|>",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
    "<repo_name>x<file_sep>y",
    "<jupyter_code>print(1)<jupyter_output>1",
    "<|im_start |> <|im_en d|> <im_end>",
    "<|IM_END|>",
    "text  <|im_end|>  text",
    "\n<|im_start|>\n",
    "e\u0301 vs \u00e9",
    "ﬁ ligature ﬂ",
    "Ａ fullwidth",
    "𝒜𝓁𝓅𝒽𝒶 𝟙𝟚𝟛",
    "\U0001f468\u200d\U0001f4bb codes",
    "𠮷野家",
    "a\u0300\u0301\u0302 stacked",
    "\U000e0041 tag",
    "MONKEY, n.  An arboreal animal which makes itself at home in\ngenealogical trees.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "AAAA BBBB",
    "word" * 8,
    "The Ġ Ċ ĉ characters",
    "mixed 한글 English 中文 日本語 العربية हिन्दी русский 😀 123",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="only write the texts to this file")
    parser.add_argument("--llama-cpp-ids", type=Path, help="the ids llama.cpp gave for them")
    args = parser.parse_args()
    if args.texts:
        args.texts.write_text(json.dumps(TEXTS))
        return
    if not args.llama_cpp_ids:
        parser.error("--llama-cpp-ids is needed: no golden value without a second opinion")
    tokenizer = smollm2.tokenizer()
    reference = json.loads(args.llama_cpp_ids.read_text())
    cases = []
    for text, expected in zip(TEXTS, reference, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected, f"{text!r}: tokenizers {ids}, llama.cpp {expected}"
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, f"{text!r} does not come back"
        cases.append({"text": text, "ids": ids})
    OUT.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
    print(f"{len(cases)} cases, all equal in both")


if __name__ == "__main__":
    main()
