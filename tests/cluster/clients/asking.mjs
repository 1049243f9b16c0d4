// What the scripts for Node have in common, as asking.py for Python: node use_NAME.mjs URL MODEL KEY, from a directory
// that has the packages.

import { readFileSync } from "node:fs";
import process from "node:process";

const [url, model, key] = process.argv.slice(2);
export const SERVED = { url, model, key };
export const ASK = "What is the capital of France?"; // which the default model answers in a sentence
// By which an answer of this model begins with thoughts, and says something behind them.
export const THINK = { thinking_token_budget: 16, min_tokens: 40 };

// Runs the checks one after the other, and prints what became of each, on a line of its own whatever a client left
// before it. Exits with the number of those that failed.
export async function run(name, ...checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  console.log(`> ${name} ${version} (Node ${process.versions.node})`);
  let failed = 0;
  for (const check of checks) {
    try {
      await check();
      console.log(`\n>   ${check.name}: ok`);
    } catch (error) {
      failed += 1;
      console.log(`\n>   ${check.name}: FAILED, ${error?.stack ?? error}`.slice(0, 1500));
    }
  }
  process.exit(failed);
}

// All that an asynchronous iterable brings.
export async function all(parts) {
  const found = [];
  for await (const part of parts) found.push(part);
  return found;
}
