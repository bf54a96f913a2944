-- Make the live shared or placed hold of one owner the hold of another.
--
-- KEYS  the gate, the index, the members
-- ARGV  name, owner, new owner, ttl in microseconds, holder, 1 if it is shared, what stands before an id in its key
-- Returns the head of the hold and its place, or 0 if it is gone.

local shared = ARGV[6] == '1'
local id, hold = find(KEYS[1], KEYS[3], ARGV[7], ARGV[3], shared)
if id then
    return string.sub(hold, 1, 48) .. (shared and '' or id) -- asked again, because the first answer got lost
end
id, hold = find(KEYS[1], KEYS[3], ARGV[7], ARGV[2], shared)
if not id then
    return 0
end
local expires = now + ARGV[4]
local head = string.format('%016.0f', expires) .. string.sub(hold, 17, 48)
if shared then
    remove(KEYS[2], KEYS[3], ARGV[7], ARGV[1], id)
    id = ARGV[3]
end
-- Never sooner in the index than it was: see adopt.lua.
redis.pcall('ZADD', KEYS[2], string.format('%.0f', math.max(expires, ends(hold))), ARGV[1] .. '\1' .. id)
redis.call('ZADD', KEYS[3], string.format('%.0f', expires), id)
redis.call('SET', ARGV[7] .. id, head .. ARGV[3] .. ARGV[5])
close(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
return head .. (shared and '' or id)
