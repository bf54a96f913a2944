-- End the shared or placed hold of its owner, and wake those who wait for the key.
--
-- KEYS  the gate, the index, the tombstone of this owner, the members, the word of a waiter
-- ARGV  name, owner, channel, life of the tombstone in milliseconds (0 for none), 1 if it is shared, what stands before
--       an id in the key of its hold
-- Returns 1, or 0 if the hold had ended before.

if ARGV[4] ~= '0' then
    redis.pcall('SET', KEYS[3], '', 'PX', ARGV[4]) -- see release.lua
end
local id = find(KEYS[1], KEYS[4], ARGV[6], ARGV[2], ARGV[5] == '1')
if not id then
    return 0
end
remove(KEYS[2], KEYS[4], ARGV[6], ARGV[1], id)
close(KEYS[1], KEYS[2], KEYS[4], ARGV[1], KEYS[5])
redis.pcall('PUBLISH', ARGV[3], '')
return 1
