// What a model thought before it answered, told apart from the answer. Pure, no DOM.
//
// A trace leaves thoughts in the text, and nothing in the API says whether a model has them: what an answer begins with
// is taken for thoughts where it is one of the tags that the server knows. Where the prompt has the first tag, none comes
// with the answer: such a text stays whole, and the model's template cuts it at the second.

const TAGS = [
  ["<think>", "</think>"],
  ["<seed:think>", "</seed:think>"],
];

/** The assistant's message that says `text`, as a conversation goes on from it; the thoughts may have been cut. */
export function answerMessage(text) {
  const said = text.trimStart();
  const [begin, end] = TAGS.find(([tag]) => said.startsWith(tag)) ?? [];
  if (!begin) return { role: "assistant", content: text };
  const over = said.indexOf(end);
  const thought = said.slice(begin.length, over < 0 ? undefined : over).trim();
  const content = over < 0 ? "" : said.slice(over + end.length).trimStart();
  return { role: "assistant", content, ...(thought && { reasoning_content: thought }) };
}
