-- Keep a session alive while a round takes long, and return whether the caller still owns it.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: epoch, time to live (ms)
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'status')
if not meta[1] then
  return {'gone'}
end
if meta[1] ~= ARGV[1] then
  return {'fenced', meta[1]}
end
if meta[2] == 'cancelled' then
  return {'cancelled'}
end
for _, key in ipairs(KEYS) do
  redis.call('PEXPIRE', key, ARGV[2])
end
return {'alive'}
