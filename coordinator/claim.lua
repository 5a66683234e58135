-- Take a session over: raise the epoch, so that its former owner cannot commit any more, and return its contents.
-- While another coordinator has a lease on it the contents are returned as they are, to be tailed.
-- A session that has ended keeps its epoch: it has no owner.
-- KEYS: meta, tokens, origins, logprobs
-- ARGV: '1' to take over, '0' only to read, without log probabilities; time to live (ms); the model that is served
--       now (empty: unknown), which a session without text takes; name of the caller; length of its lease (ms)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {}
end
local is_leased = 0
if ARGV[1] == '1' and redis.call('HGET', KEYS[1], 'status') == 'active' then
  if lease_left_ms(KEYS[1]) > 0 and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[4] then
    is_leased = 1
  else
    redis.call('HINCRBY', KEYS[1], 'epoch', 1)
    redis.call('HSET', KEYS[1], 'owner', ARGV[4])
    renew_lease(KEYS[1], ARGV[5])
    local lengths = redis.call('HMGET', KEYS[1], 'length', 'prompt_length')
    if #ARGV[3] > 0 and lengths[1] == lengths[2] then
      redis.call('HSET', KEYS[1], 'model', ARGV[3])
    end
    -- a session that is resumed just before it expires must not vanish before its next commit
    for _, key in ipairs(KEYS) do
      redis.call('PEXPIRE', key, ARGV[2])
    end
  end
end
local logprobs = ARGV[1] ~= '0' and redis.call('GET', KEYS[4]) or ''
return {redis.call('HGETALL', KEYS[1]), redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or '', logprobs,
  is_leased}
