"""What is asked and told, in OpenAI's words (and vLLM's, where it has more). No Ray in here, and no route.

Asked: `schemas` are the bodies (`messages`, `tools`, `structured` their parts, within `limits`), `responses_asked`
makes a chat of what the Responses API is asked (`responses_tools`: of its tools); `tagged_schemas` says what calls in
tags have to follow, `schema_types` of which types a schema's values are; `prompts` turns text into token ids, as far as
they `reach`, `sampling` says how the answer is picked.

Told: `answer` is a request's answer as it grows, step by step. `thoughts` tells what the model only thinks apart,
`tool_calls` finds the calls in the rest (`tagged_arguments` reads those in tags), `spelling` spells single tokens,
`acceptance` counts drafts.
`completions_told` writes it down as a completion or a chat (`logprobs`), `responses_told` as an object of the Responses
API, both by `encoding`. `openapi` describes it all.
"""
