-- Return what a session's log has gained, for those who follow it at another coordinator than its owner's.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: tokens that the caller has, prompt included; bytes of log probabilities that it has
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'status', 'digest', 'finish', 'statistics', 'length',
  'prompt_length')
if not meta[1] then
  return {}
end
local left, known, tokens, origins, logprobs = lease_left_ms(KEYS[1]), tonumber(ARGV[1]), '', '', ''
if tonumber(meta[6]) > known then
  tokens = redis.call('GETRANGE', KEYS[2], 4 * known, -1)
  origins = redis.call('GETRANGE', KEYS[3], known - tonumber(meta[7]), -1)
  logprobs = redis.call('GETRANGE', KEYS[4], ARGV[2], -1)
end
return {meta[1], meta[2], meta[3], meta[4], meta[5], meta[6], left, tokens, origins, logprobs}
