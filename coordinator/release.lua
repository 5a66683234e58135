-- End the lease of an owner that runs the session no more, so that another coordinator may claim it at once.
-- KEYS: meta
-- ARGV: epoch
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'leased_at')
end
return 'released'
