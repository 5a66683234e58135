-- Append one round, if the caller still owns the session and knows its length, and renew the owner's lease. Recognises
-- a replay of itself: the client library repeats a command whose reply was lost.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: epoch, base length, base digest, digest, packed tokens, packed origins, packed logprobs, time to live (ms),
--       status, finish reason, statistics, length of the lease (ms)
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'length', 'digest', 'status')
if not meta[1] then
  return {'gone'}
end
if tonumber(meta[1]) > tonumber(ARGV[1]) then
  return {'fenced', meta[1]}
end
if tonumber(meta[1]) < tonumber(ARGV[1]) then
  return {'conflict', meta[2]}
end
local length = tonumber(ARGV[2]) + #ARGV[5] / 4
-- before the look at the status: a session may be cancelled between a commit and its replay
if tonumber(meta[2]) == length and meta[3] == ARGV[4] then
  return {'committed'}
end
if meta[2] ~= ARGV[2] or meta[3] ~= ARGV[3] or redis.call('STRLEN', KEYS[2]) ~= 4 * tonumber(meta[2]) then
  return {'conflict', meta[2]}
end
if meta[4] == 'cancelled' then
  return {'cancelled'}
end
if meta[4] ~= 'active' then
  return {'conflict', meta[2]}
end
redis.call('HSET', KEYS[1], 'length', string.format('%d', length), 'digest', ARGV[4], 'status', ARGV[9],
  'finish', ARGV[10], 'statistics', ARGV[11])
renew_lease(KEYS[1], ARGV[12])
redis.call('APPEND', KEYS[2], ARGV[5])
redis.call('APPEND', KEYS[3], ARGV[6])
if #ARGV[7] > 0 then
  redis.call('APPEND', KEYS[4], ARGV[7])
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, ARGV[8])
end
return {'committed'}
