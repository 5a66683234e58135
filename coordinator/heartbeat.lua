-- Renew the owner's lease and keep a session alive while a round takes long, or only compare it; return whether the
-- caller still owns it.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: epoch, time to live (ms; 0: only compare), committed length and digest as the caller knows them (a commit may
--       be under way), length of the lease (ms)
local meta = redis.call('HMGET', KEYS[1], 'epoch', 'length', 'digest', 'status')
if not meta[1] then
  return {'gone'}
end
if tonumber(meta[1]) > tonumber(ARGV[1]) then
  return {'fenced', meta[1]}
end
local behind = tonumber(meta[2]) - tonumber(ARGV[3])
if tonumber(meta[1]) < tonumber(ARGV[1]) or behind < 0 or (behind == 0 and meta[3] ~= ARGV[4]) then
  return {'conflict', meta[2]}
end
if meta[4] == 'cancelled' then
  return {'cancelled'}
end
if tonumber(ARGV[2]) > 0 then
  -- a heartbeat that is late must not renew what was released
  if redis.call('HEXISTS', KEYS[1], 'leased_at') == 1 then
    renew_lease(KEYS[1], ARGV[5])
  end
  for _, key in ipairs(KEYS) do
    redis.call('PEXPIRE', key, ARGV[2])
  end
end
return {'alive'}
