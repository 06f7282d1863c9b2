"""The awkward strings that tokenizers are compared on. Bytes, because some are no UTF-8."""


def strings():
    out = []

    def add(*items):
        for s in items:
            out.append(s if isinstance(s, bytes) else s.encode("utf-8"))

    # spaces, tabs, line ends
    add("", " ", "  ", "   ", "        ", " " * 33, "\t", "\t\t", "\t \t", "\n", "\n\n", "\n\n\n", "\n" * 40,
        "\r\n", "\r\n\r\n", "\r", "\n\r", " \n", "\n ", " \n \n ", "a\n", "a \n", "a\n b", "a\n\n  b", "a \n\n b",
        "a\tb", "a\t\tb", "a \tb", "a\t b", "  a", "a  ", "  a  ", " a b  c   d    e", "a\r\nb\r\n\r\nc", "a\r\n  b",
        "\ta\n\t\tb\n\t\t\tc", "a\u00a0b", "a \u00a0 b", "\u00a0", "a\u2003b", "a\u3000b", "\u3000\u3000a", "a\u2028b\u2029c",
        "a\u0085b", "a\u200bb", "a\u202fb", "a\u205fb", "a\u1680b", "a\ufeffb", "\ufeffa", "a\x0bb\x0cc", "   \n   a", "a   \n\n\n   b",
        "x\n\n\n\n\n\n\n\n\n\ny", "\n  \n", " \t\n\t ", "a \r\n \r\n b")
    # words, contractions, apostrophes
    add("Hello world", "Hello, world!", "hello", "HELLO", "Hello World foo Bar BAZ", "I'm you're he's we've they'll I'd can't",
        "I'M YOU'RE HE'S WE'VE THEY'LL I'D CAN'T", "I\u2019m you\u2019re he\u2019s we\u2019ve they\u2019ll I\u2019d can\u2019t", "'s", "'S",
        "'sx", "'Sx", "'re'RE'rE'Re", "x'", "'x", "''s", "' s", "'\u017f", "x'\u017fy", "'LLama", "'llama", "'dog 'me 'them 'version", "rock'n'roll",
        "o'clock", "don''t", "`s `t", "\u02bcs", "it's John's dogs'", "L'été d'une", "camelCaseWordsHere", "snake_case_words", "kebab-case",
        "SCREAMING_SNAKE", "McDonald iPhone eBay", "ABCdefGHI", "XMLHttpRequest", "ÉCOLE école Éa ÀÉb ǅa", "aB", "Ab", "AB", "ABc", "aBC")
    # numbers
    add("0", "1", "12", "123", "1234", "12345", "1234567", "3.14159", "1,000,000", "1e-10", "0x1F", "2024-01-31", "12:34:56", "a1b2c3", " 1",
        "  12", "1 2 3", "1234567890" * 12, "9" * 100, " 0000", "x86_64", "v1.2.3-rc4", "½ ⅓ ¾", "²³¹", "Ⅷ", "٣٤٥", "१२३", "①②③", "𝟘𝟙𝟚",
        "１２３", "〇一二三", "100%", "$5.99", "#1", "1st 2nd 3rd", "+1-2*3/4", "½a", "a½", "1½", "二〇二四年", "007", "1_000")
    # punctuation and code
    add("!", "!!!", "...", "…", "?!?!", "()", "(a)", "((a))", "[a](b)", "{a: b}", "a,b;c:d", "a.b.c", "-- a --", "—", "a—b", "a – b", "\"quoted\"",
        "“quoted”", "«a»", "„a“", "a/b/c", "\\n\\t", "C:\\dir\\file", "//comment", "/* c */", "# title", "## title\n\ntext", "* a\n* b\n", "- [ ] x",
        "=====", "----------", "~~~~", "<<<>>>", "a<b>c", "<a href=\"x\">y</a>", "<div>\n  <p>x</p>\n</div>", "&amp;&lt;", "@user #tag", "a@b.co",
        "https://example.org/a?b=c&d=e#f", "$x = $y + 1;", "a+=b", "a&&b||c", "!=", "==", "->", "=>", "::", "**bold**", "__init__", "`code`",
        "```c\nint x;\n```", "int main(void)\n{\n\treturn 0;\n}\n", "def f(x):\n    return x ** 2\n", "if (a < b && c > d) { x++; }",
        "for (let i = 0; i < 10; i++) {\r\n  console.log(`${i}`);\r\n}", "SELECT * FROM t WHERE a = 'b';", "printf(\"%d\\n\", x);", "a\n}\n\n}\n",
        "  }\n\n  // x\n", "x = [1, 2, 3]\n", "{\"a\": [1, 2.5, null, true]}", "a !b", "a  !b", ".\n", ".\n\n", "!\r\n", "!\n \n", "a.\n\n\nB", "(\n\n)",
        "+-*/=^|~", "a^b", "a|b", "$", "$$", "a$b", "§ 5", "© ® ™", "€ £ ¥", "← → ↑", "∀x∈ℝ", "a≤b", "√2", "¿Qué?", "¡Hola!", "/\n/\n", "a/\nb",
        "!/\n/x", "¬¢", "·", "a·b", "_", "_a", "a_", "%s", "^", "`")
    # scripts
    add("naïve café", "nai\u0308ve cafe\u0301", "e\u0301", "\u0301", " \u0301", "a\u0301\u0302\u0303", "\u0301a", "ﬁ ﬂ", "ß ẞ", "İ ı", "Ω ω Ώ", "Привет, мир!", "ПРИВЕТ",
        "Γειά σου Κόσμε", "שלום עולם", "שָׁלוֹם", "مرحبا بالعالم", "مَرْحَبًا", "سلام، دنیا", "\u202eabc\u202c", "नमस्ते दुनिया", "ক্ষ", "தமிழ் மொழி", "ไทยภาษา",
        "ສະບາຍດີ", "မြန်မာ", "ខ្មែរ", "ཨོཾ་མ་ཎི", "გამარჯობა", "Բարև", "አማርኛ", "ᏣᎳᎩ", "你好，世界！", "你好世界", "漢字とかな交じり文。", "カタカナ ひらがな", "ｶﾀｶﾅ", "こんにちは世界", "東京都は日本の首都です。",
        "한국어 문장입니다.", "ㅋㅋㅋ", "\u1112\u1161\u11ab", "𠀀𠀁", "𪚥", "English中文mixed", "中文 English 中文", "中文123中文", "。、！？", "「引用」", "《书》", "𝒽𝑒𝓁𝓁𝑜", "𝐀𝐁", "Ａｂｃ", "ǅ ǈ", "ʰ ʷ",
        "Tiếng Việt", "Ti\u1ebfng Vi\u1ec7t", "Łódź", "çöğüş", "Straße", "œuvre", "ÅÄÖåäö", "\u0e33", "\u0600a", "a\u094db", "\u093f", "क\u093f", "\u20dd", "a\u20dd", "ᄀᄀᄀ")
    # emoji and symbols beyond the first plane
    add("😀", "😀😀😀", "Hi 😀!", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☺", "1️⃣", "⌚", "a😀b", " 😀 ", "🤷🏻‍♀️ ok", "🫠", "\U0001fae8", "👩‍💻 codes", "🎉🎊\n🎈", "\u200d", "\ufe0f", "𓀀", "🀄", "🧑‍🚀🚀", "\U000e0061")
    # control, private, unassigned, odd code points
    add("\x00", "a\x00b", "\x00\x00", "\x01\x02\x03", "\x1b[31mred\x1b[0m", "\x7f", "a\x7fb", "\u0080\u009f", "\u00ad", "co\u00adop", "\ue000", "\uf8ff", "\U0010ffff",
        "\U000f0000", "\ufffd", "\ufffe", "\uffff", "\u0378", "\U0003ffff", "\u2060", "\u061c", "\u180e", "a\u180eb", "\x1c\x1d\x1e\x1f", "\u2581", "a\u2581b", "\u2581\u2581", "\u0120hello", "Ġ", "Ċ", "ĠĠ")
    # invalid UTF-8
    add(b"\xff", b"\xfe\xff", b"a\xffb", b"\xc3", b"\xc3(", b"\xe2\x82", b"\xe2\x82a", b"\xf0\x9f\x98", b"\xf0\x9f\x98 x", b"\x80\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"ok \xe2\x28\xa1 ok",
        b"caf\xe9", b"\xe9\xe8\xea", b"a\xc3", b" \xc3 ", b"1\xf01", b"\xe4\xbd\xa0\xe5\xa5", b"\xef\xbf", b"\xbf\xbd")
    # what looks like special tokens
    add("<|im_start|>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "a<|endoftext|>b", "<|im_start|", "<|im_start |>", "<<|im_end|>>", "<|im_end|><|im_end|>",
        "<bos>", "<bos>hi", "hi<bos>", "<bos><bos>hi", " <bos> hi", "<eos>", "<pad>", "<unk>", "<mask>", "a<mark>b", "<mark>ed", "<mark> <mark>edx", "<start_of_turn>user\nhi<end_of_turn>\n", "<start_of_turn", "[multimodal]", "<start_of_image>", "a<end_of_image>b",
        "<unused0>", "<unused10>", "<unused6241>", "<unused99999>", "<0x0A>", "<0x41>", "<s>", "</s>", "[INST] hi [/INST]", "<filename>a.c", "<reponame>x", "<repo_name>x", "<table><tr><td>x</td></tr></table>", "<h1>T</h1>", "<code>x</code>", "<strong>x</strong>", "<b>x</b>")
    # long and repetitive
    add("a" * 300, "ab" * 200, "aaaa bbbb " * 40, "the " * 50, "!" * 200, "=" * 77, "-" * 130, "." * 65, "#" * 40, "_" * 90, "*" * 33, " a" * 60, "ha" * 80, "\u00e9" * 60, "\u4f60" * 40, "😀" * 30, "0" * 64 + "x", "A" * 100, "\\" * 41, " " * 200 + "x", "\t" * 40 + "x")
    # sentences
    add("The quick brown fox jumps over the lazy dog.", "  The quick   brown fox\tjumps\nover the lazy dog.  ", "Lorem ipsum dolor sit amet, consectetur adipiscing elit.", "Zażółć gęślą jaźń", "Pijamalı hasta yağız şoföre çabucak güvendi.",
        "Съешь же ещё этих мягких французских булок, да выпей чаю", "Victor jagt zwölf Boxkämpfer quer über den großen Sylter Deich", "いろはにほへと ちりぬるを", "Portez ce vieux whisky au juge blond qui fume", "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
        "Q: What is 2+2?\nA: 4.\n\nQ: And 3*7?\nA:", "Dear Sir/Madam,\n\nI'd like to apply.\n\nYours,\nJ. O'Neil", "E = mc^2, F=ma; ∮E·da = Q", "Call me at +1 (555) 010-9999 or mail a.b@c.example", "a\u0000b\u0001c\ufffdd", "tail space ", " lead space", "two  spaces", "ends\n", "\nstarts")
    return out
