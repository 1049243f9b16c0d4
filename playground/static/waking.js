// Why a first token is long in coming: the model slept, and an engine has to start.

import { byReplica, missing, parseMetrics } from "./prometheus.js";

const LOOK_MS = 2000;
export const WAITING = "Waiting for the first token…";

/**
 * While `waits()`, `say` whether `model` is being woken. Looks now and then until an engine is there, and no more where
 * one is from the first, or where the metrics do not open to this visitor.
 */
export async function tellOfWaking(server, model, waits, say) {
  let wakes;
  do {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    if (!waits()) return;
    wakes = await sleeps(server, model);
    if (waits()) say(wakes ? `${model} slept. An engine starts for it…` : WAITING);
  } while (wakes);
}

async function sleeps(server, model) {
  try {
    const samples = parseMetrics(await server.metrics());
    const there = [...byReplica(samples).values()].map((replica) => replica.model);
    return Boolean(missing(samples, there).get(model)?.sleeps);
  } catch {
    return false;
  }
}
