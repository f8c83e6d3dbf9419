/**
 * What /page/live answers; see cluster/page/live.py.
 *
 * @typedef {{request_id: string, branch: number, num_prompt_tokens: number, num_cached_tokens: number,
 *   num_computed_tokens: number, num_tokens: number, num_blocks: number, table: [number, number][]}} SequencePages
 *
 * @typedef {{num_blocks: number, block_size: number, blocks_per_page: number, pages: string,
 *   num_blocks_by_state: Record<string, number>, num_running: number, num_waiting: number, max_num_seqs: number,
 *   sequences: SequencePages[]}} PoolState
 *
 * @typedef {{p50_s: number | null, p99_s: number | null}} Latency
 *
 * @typedef {{model: string, knowledge: string | null, num_running: number, num_waiting: number, kv_usage: number,
 *   num_blocks: number, hit_rate: number | null, generated_tokens_per_s: number}} GroupNumbers
 *
 * @typedef {{group: string, numbers: GroupNumbers | null, pool: PoolState | null}} Group
 *
 * @typedef {{model: string, num_in_flight: number, num_queued: number, requests_per_s: number,
 *   generated_tokens_per_s: number, ttft: Latency, itl: Latency}} Model
 *
 * @typedef {{group: string, knowledge: string, has_room: boolean, num_sequences: number, cached_tokens: number,
 *   expected_ttft_s: number, cost: {total_s: number}}} Candidate
 *
 * @typedef {{request_id: string, model: string, reason: string, detail: string, age_s: number, made_at_s: number,
 *   queued_s: number, num_prompt_tokens: number, group: string | null, expected_cached_tokens: number,
 *   actual_cached_tokens: number | null, expected_ttft_s: number, actual_ttft_s: number | null,
 *   num_candidates: number, candidates: Candidate[]}} Decision
 *
 * A point: [at, TTFT p50, p99, TPOT p50, p99, prompt tokens/s, generated tokens/s, requests/s, hit rate]
 * @typedef {(number | null)[]} Point
 *
 * @typedef {{next_s: number, points: Point[], models: Model[], groups: Group[], num_not_drawn: number,
 *   decisions: Decision[] | null, decisions_per_s: Record<string, number>}} View
 */

export {};
