"""Questions in the shape of common tasks, about passages that the target has written itself.

    python task_questions.py OUT/texts.jsonl tasks.jsonl [--seed 5] [--times 1]

The questions that a chat model invents are mostly requests for advice, stories and code. A drafter trained on the
answers is right about half as often when the target translates, or answers from a given text. OUT is the directory of
an earlier `crossdraft train`; the questions are for `--questions` of the next one. Where OUT holds translations
already, some of them are to be translated back. Seeded: same texts, same questions.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

from crossdraft import load_model

LANGUAGES = ["German", "French", "Spanish", "Italian", "Portuguese", "Dutch"]
SUBJECTS = """the French Revolution, the Great Wall of China, photosynthesis, the Roman Empire, the Moon landing,
Isaac Newton, Marie Curie, the Amazon River, Mount Everest, the human heart, the stock market, the Eiffel Tower,
the Olympic Games, jazz music, the Pacific Ocean, volcanoes, the printing press, the United Nations, black holes,
vaccines, the Panama Canal, Shakespeare's plays, the World Wide Web, coffee, electric cars, the Sahara desert,
penicillin, the Mona Lisa, basketball, the Titanic, dinosaurs, the Berlin Wall, Mahatma Gandhi, the periodic table,
chess, the Great Depression, solar panels, honey bees, the Nile, the telephone, the Renaissance, Beethoven,
the Supreme Court, gravity, the blue whale, rice farming, the Golden Gate Bridge, tea, the Beatles, DNA,
the solar system, Hollywood, steam engines, the metric system, the Silk Road, Antarctica, credit cards,
the Constitution, rain forests, bicycles"""
FACTS = [
    "who discovered or invented {}",
    "when did {} begin",
    "where is {} found",
    "what is {} best known for",
    "why is {} important",
    "how does {} work",
    "what is the meaning of {} in history",
    "how many people are connected with {}",
    "name one fact about {}",
    "what happened to {} in the end",
    "who is most often linked with {}",
    "what year is associated with {}",
]
SUMMARISE = [
    "Summarize: ",
    "Summarize the following text: ",
    "Write a short summary of this article.\n\n",
    "Give the main points of this text in one paragraph:\n",
]
ABOUT = [
    "What does the text say about {}?",
    "Why does {} matter here?",
    "What is said of {}?",
    "How is {} described?",
]
FROM_TEXT = [
    "Answer the question from the passage below.\n\nPassage: {p}\n\nQuestion: {q}",
    "Use the following documents to answer.\n\nDocument [1] {p}\n\nQuestion: {q}\nAnswer:",
    "Context: {p}\n\n{q}",
]
#: Questions of each kind; of facts, for each subject.
FACTS_EACH, SUMMARIES, READINGS, TRANSLATIONS = 3, 110, 110, 130
SENTENCES = 9


def main(texts: Path, out: Path, seed: int, times: int) -> None:
    tokenizer = load_model("smollm2-135m-instruct").tokenizer
    rng = random.Random(seed)
    passages = []  # passages, as sentences
    translated = []  # language and text
    for line in texts.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = str(tokenizer.decode(row["response"], skip_special_tokens=True)).strip()
        request = re.search(r"(?:to|into) (German|French|Spanish)[:.]", str(tokenizer.decode(row["prompt"])))
        if request and 25 < len(text) < 260:
            translated.append((request[1], text))
        if row["source"] != "invented" or "```" in text:
            continue
        sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", text.replace("\n", " ")) if 25 < len(s) < 260]
        if len(sentences) >= 4:
            passages.append(sentences)
    rng.shuffle(passages)
    fresh = list(passages)

    def passage() -> str:
        return " ".join((fresh.pop() if fresh else rng.choice(passages))[:SENTENCES])

    results: list[tuple[str, str]] = []
    for subject in " ".join(SUBJECTS.split()).split(", "):
        for form in rng.sample(FACTS, min(FACTS_EACH * times, len(FACTS))):
            q = form.format(subject)
            results.append(("qa", rng.choice([q, f"{q}?", f"{q[0].upper()}{q[1:]}?", f"Answer briefly: {q}?"])))
    for _ in range(SUMMARIES * times):
        results.append(("summarization", rng.choice(SUMMARISE) + passage()))
    for _ in range(READINGS * times):
        text = passage()
        word = rng.choice(re.findall(r"[A-Za-z]{5,}", text) or ["it"])
        question = rng.choice(ABOUT).format(word.lower())
        results.append(("rag", rng.choice(FROM_TEXT).format(p=text, q=question)))
    for _ in range(TRANSLATIONS * times):
        sentence = rng.choice(rng.choice(passages)[:6])
        language = rng.choice(LANGUAGES)
        forms = [
            f"Translate to {language}: {sentence}",
            f"Translate English to {language}: {sentence}",
            f"Translate this sentence into {language}.\n\n{sentence}",
        ]
        results.append(("translation", rng.choice(forms)))
    for language, text in translated:
        results.append(("translation", f"Translate {language} to English: {text}"))
    rng.shuffle(results)
    lines = [json.dumps({"question": question, "category": kind}) + "\n" for kind, question in results]
    out.write_text("".join(lines), encoding="utf-8")
    print(
        f"{len(results)} questions in {out}:",
        ", ".join(f"{n} {kind}" for kind, n in Counter(kind for kind, _ in results).items()),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--times", type=int, default=1, help="how often the usual number of each kind")
    args = parser.parse_args()
    main(args.texts, args.out, args.seed, args.times)
